import{b as a}from"./chunk-GQS2K2L7.js";import"./chunk-LEP6EUUJ.js";import"./chunk-OOJM4CTU.js";export{a as Answer};
