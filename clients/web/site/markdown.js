import{b as a}from"./chunk-2OW4CYBC.js";import"./chunk-OOJM4CTU.js";export{a as Answer};
